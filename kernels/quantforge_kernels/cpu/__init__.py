"""Code for processors, made by LLVM when it is first needed: what torch has no fast operator for."""
