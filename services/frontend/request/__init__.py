"""What a client asks for, whichever protocol it speaks, and the rules it must keep."""
