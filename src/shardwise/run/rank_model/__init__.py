"""Build one rank's model from a plan, once for training and once for each other batch form."""
