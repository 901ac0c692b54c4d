"""Folder that `shardwise audit` puts first on PYTHONPATH; its `sitecustomize` starts the recorder in every process of a script."""
