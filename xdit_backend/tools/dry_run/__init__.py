"""A rank's own work on a device that is not there: tensors that have shapes and no numbers, process groups that carry
nothing. What runs is the workers' code."""
