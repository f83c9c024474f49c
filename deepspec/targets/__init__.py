"""The frozen target: loading, its layers, its families, and the features captured from it."""
