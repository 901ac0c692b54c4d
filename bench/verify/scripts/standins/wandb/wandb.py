"""What scripts tell Weights & Biases is dropped."""


class Run:
    def __init__(self):
        self.config = {}

    def log(self, values):
        pass


def init(**settings):
    return Run()


def Histogram(values):  # the library's name
    return None


def Image(pixels):  # the library's name
    return None
