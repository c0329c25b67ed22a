"""What holds for all tests."""

from hypothesis import settings

# Speed is measured in `benchmarks/`; a busy machine must not fail a test of behaviour.
settings.register_profile("orcinus", deadline=None)
settings.load_profile("orcinus")
