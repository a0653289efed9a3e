"""Standard input, output and error of this process, open whatever started it."""

import os


def open_missing() -> None:
    """Open those of descriptors 0 to 2 that are closed on the null device.

    Else the next socket gets such a number, and with it what is printed; in a process that is started with it,
    it is replaced by that one's own standard stream.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            # Also for its own sake: unlike what os.open gives, the copy is passed on to what this process starts.
            spare = os.dup(opened) if opened == number else opened
            os.dup2(spare, number)
            os.close(spare)
