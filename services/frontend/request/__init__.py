"""A client's request, whichever protocol it came by, and the rules that it must keep."""
