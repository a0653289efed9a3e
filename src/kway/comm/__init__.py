"""What ranks say to each other: reductions, gathers and broadcasts with a defined order."""
