"""Rollouts: trajectories, agents, rewards, filtering, buffering, dumps and metrics. No Ray, no torch."""
