"""UltraEP's planner as published, to compare with.

Training uses the quota planner instead, `balance/strategies/quota.py`.
"""
