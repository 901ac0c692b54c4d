"""Nothing is drawn."""


def save_image(*args, **kwargs):
    pass


def make_grid(*args, **kwargs):
    pass
