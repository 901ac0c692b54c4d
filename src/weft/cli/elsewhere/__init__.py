"""The same `weft train` on other machines: what is started where (`job`), and each way of starting it."""

PORT = 29400  # where ranks meet
IMAGE = "pytorch/pytorch:latest"  # of a container
