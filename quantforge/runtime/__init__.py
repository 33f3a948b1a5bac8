"""The runtime: models of any format that we read, computing on packed weights, to be measured."""
