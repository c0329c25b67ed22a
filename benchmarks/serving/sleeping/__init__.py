"""Systems that are real but for their ranks, which sleep for what a machine's iterations take."""
