"""Hydra configuration groups; this file makes them reachable as pkg://specdec.conf."""
