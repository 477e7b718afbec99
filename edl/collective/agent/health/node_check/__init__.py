"""Tests of nodes before they join: `runner` meets the others and runs `probe`, whose work is in `workload`."""
