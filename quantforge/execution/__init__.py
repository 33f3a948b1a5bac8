"""The run: a plan carried out one part of the model at a time, journalled, so that it goes on after any kill."""
