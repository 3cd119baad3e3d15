"""What the rows of a model's layers are: rotation files, the model and weights that they are of, sizes on a rank."""
