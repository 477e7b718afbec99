"""The batch size that makes the most progress a second (Pollux): noise of gradients, time of steps, their product."""
