"""Runs programs: split backward, stages, transports, the executor and its clock."""
