"""Launchers of `shardwise train` on other machines: the job (`job`), and one module each for SLURM, Ray, ssh and manifests."""

PORT = 29400  # where ranks meet
IMAGE = "pytorch/pytorch:latest"  # of a container
