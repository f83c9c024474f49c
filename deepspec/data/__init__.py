"""Conversations to batches: chat rendering and loss masks, answers, anchors, the batch plan, the loader."""
