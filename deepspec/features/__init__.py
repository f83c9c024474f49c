"""Where the features of the target come from."""
