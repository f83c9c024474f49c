"""The training loop and the engines that run its steps."""
