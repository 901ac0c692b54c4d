"""`get` of an archive opens the file of its name that lies in the folder data."""

from pathlib import Path


class Answer:
    def __init__(self, path):
        self.raw = path.open("rb")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.raw.close()


def get(address, stream=False):
    return Answer(Path("data") / address.rpartition("/")[2])
