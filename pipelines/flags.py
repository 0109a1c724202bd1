"""What the flags of several commands share."""

import argparse

EXIT_CODES = """\
exit codes: 0 done, 1 failed, 2 bad input, 3 not blessed (with --fail-unless-blessed),
            130 interrupted, 143 preempted (a checkpoint was saved; run again to go on)"""


def count(text: str) -> int:
    """A whole number of a flag, at least 1."""
    number = int(text) if text.isascii() and text.isdecimal() else 0
    if not 1 <= number <= 1_000_000:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number from 1 to 1,000,000")
    return number
