"""`rookery train`: runs a learner, actors and an evaluator as processes on this machine until the target."""
