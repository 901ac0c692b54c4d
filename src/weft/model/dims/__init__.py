"""What dims of tensors stand for: samples, features, positions."""
