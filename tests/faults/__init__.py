"""Every role of a running system is killed, stopped and cut off at random, again and again, while
clients write down each token they get; a checker then reads what they have written."""
