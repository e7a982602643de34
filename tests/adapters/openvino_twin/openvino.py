"""The one name of `openvino` that the worker uses."""


class Tensor:
    def __init__(self, array):
        self.data = array
