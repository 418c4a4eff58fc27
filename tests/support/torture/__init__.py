"""The torture suite: models and training steps that ask more of a wrapper than the usual loop does."""
