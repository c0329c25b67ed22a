"""The numbers that the paper reports, as far as its figures can be read.

The points of Figure 10 were read from its image by hand, to about 3 % in latency and 0.02
requests/s in throughput. Of Figure 9 only part b could be read, by a vision model and not by hand,
to two or three digits: these are the least certain numbers here. No number of Figure 11 could be
read. Numbers from the paper's text are exact.
"""

from collections.abc import Mapping, Sequence

Point = tuple[float, float]
"""Throughput in requests per second, and median normalised latency in ms per token."""

BATCH_SIZES = (1, 2, 4, 8, 16, 32)
N_OUTPUT = 32
"""Number of tokens that each request generates in Figure 9."""

FIGURE_9B_MS: Mapping[tuple[str, int], Sequence[float]] = {
    ("orca", 32): (1000, 1060, 1150, 1230, 1260, 1420),
    ("orca", 128): (1050, 1130, 1210, 1320, 1500, 1950),
    ("ft", 32): (1000, 1020, 1080, 1130),
    ("ft", 128): (1000, 1050, 1120, 1200),
}
"""Times in ms of batches for 101B, by engine and prompt length in tokens. Each sequence has a time
for each of `BATCH_SIZES`, up to the largest batch for which the engine has memory."""

FIGURE_9C_MS_PER_TOKEN = 95.0
"""Orca's time in ms per token for 175B and a batch of 32 requests with prompts of 128 tokens. It is
half of the 190 ms per token of section 6.2, which is "twice the normalised execution time of
orca(128) in Figure 9c"."""

FIGURE_9C_FASTER = 1.47
"""Largest ratio of FasterTransformer's time to Orca's for 175B (section 6.1)."""

FIGURE_10: Mapping[str, Mapping[str, Sequence[Point]]] = {
    "101B": {
        "orca(32)": (
            (0.136, 41.7),
            (0.39, 67),
            (0.525, 71),
            (0.82, 76),
            (1.02, 78),
            (1.53, 82),
            (2.05, 86.7),
            (2.55, 91),
            (2.97, 95),
            (4.06, 104),
            (5.09, 116),
            (5.96, 151),
            (6.11, 419),
            (6.29, 783),
            (6.22, 1493),
        ),
        "orca(16)": ((3.98, 107), (4.54, 330), (4.53, 838), (4.52, 1357)),
        "orca(8)": ((2.52, 98), (2.71, 330), (2.70, 1169)),
        "orca(1)": ((0.136, 42), (0.247, 62), (0.383, 83), (0.427, 232), (0.464, 558)),
        "ft(1,1)": (
            (0.087, 32.8),
            (0.204, 34.4),
            (0.247, 39),
            (0.315, 50),
            (0.377, 68),
            (0.433, 134),
            (0.50, 384),
        ),
        "ft(8,8)": (
            (0.08, 41),
            (0.204, 118),
            (0.247, 208),
            (0.303, 255),
            (0.365, 311),
            (0.507, 524),
            (0.525, 1566),
        ),
    },
    "175B": {
        "orca(32)": (
            (0.14, 55),
            (0.39, 57),
            (0.52, 57.6),
            (0.81, 59),
            (1.01, 61),
            (1.53, 65),
            (2.05, 70),
            (2.56, 75),
            (2.99, 80),
            (4.07, 92),
            (5.10, 110),
            (6.0, 132),
            (6.81, 193),
            (7.01, 486),
            (7.0, 1110),
        ),
        "orca(16)": ((4.05, 93.5), (4.91, 157), (4.94, 606)),
        "orca(8)": ((2.56, 75), (2.99, 96), (3.15, 683), (3.17, 1384)),
        "orca(1)": ((0.38, 59), (0.435, 83), (0.527, 169), (0.576, 983)),
        "ft(1,1)": ((0.08, 76), (0.135, 100), (0.19, 196), (0.208, 492), (0.214, 951)),
        "ft(8,8)": ((0.08, 123), (0.116, 492), (0.165, 794), (0.19, 951), (0.214, 1729)),
    },
    "341B": {
        "orca(32)": (
            (0.139, 100),
            (0.39, 109),
            (0.51, 113),
            (0.82, 117),
            (1.0, 120),
            (1.52, 130),
            (2.04, 142),
            (2.52, 157),
            (2.94, 173),
            (4.01, 222),
            (5.06, 283),
            (5.90, 337),
            (6.06, 592),
            (6.32, 930),
            (6.35, 1570),
        ),
        "orca(16)": ((3.97, 220), (4.50, 430), (4.49, 948)),
        "orca(8)": ((2.52, 157), (2.89, 201), (2.97, 899), (3.0, 1645)),
        "orca(1)": ((0.39, 117), (0.435, 145), (0.50, 335), (0.52, 1375)),
        "ft(1,1)": ((0.085, 154), (0.115, 385), (0.139, 1083)),
        "ft(8,8)": ((0.085, 573), (0.09, 1412)),
    },
}
"""Points (throughput, latency) by model and system. The number in a system's name is its largest
batch; FasterTransformer has a second number, the size of its microbatches."""

HEADLINE_MS_PER_TOKEN = 190.0
HEADLINE_PER_S = {"orca(32)": 6.81, "ft(1,1)": 0.185}
"""Throughputs in requests per second for 175B at `HEADLINE_MS_PER_TOKEN`. Their ratio is the 36.9
of the paper's abstract."""
