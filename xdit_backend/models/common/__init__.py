"""What a family's file (models/) is written in: the plan of a model, and the words for files, names,
positions and arguments."""
