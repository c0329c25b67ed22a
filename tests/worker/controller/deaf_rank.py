"""A rank that never ends by itself and hears nothing, as in the middle of a long iteration."""

import time

time.sleep(3600)
