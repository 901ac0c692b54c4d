"""Memory format of values: strides, dtypes under autocast."""
