"""Generation: the protocol of engines, keyed sampling, engines and environments. No role (`hpcrl.workers`), and no
order of prompts (`hpcrl.run.rollouts`)."""
