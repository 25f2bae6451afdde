"""Runs compared: a table for the terminal, and a page for the browser.

Python counts and says, JavaScript draws.
"""
