"""What the commands do besides running a model, as functions on files."""
