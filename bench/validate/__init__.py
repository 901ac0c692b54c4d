"""Predictions beside measurements that others published. In: a folder of tables. Out: an error per table, cross-validated."""
