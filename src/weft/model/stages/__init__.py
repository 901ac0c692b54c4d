"""What a graph is divided into: pipeline stages, parallel branches, cores of attention."""
