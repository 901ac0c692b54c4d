"""One process, of which Lightning asks MPI: its library need not be on the machine."""


class MPI:
    class COMM_WORLD:
        @staticmethod
        def Get_size():
            return 1
