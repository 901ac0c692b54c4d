"""Deployment of inference workflows: profiling of operators, serving a plan on Ray Serve, load tests, and weight updates."""
