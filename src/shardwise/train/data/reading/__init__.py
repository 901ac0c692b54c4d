"""Readers of data files in many formats: records, tokenized documents, tables and images."""
