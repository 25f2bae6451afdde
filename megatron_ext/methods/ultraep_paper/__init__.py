"""UltraEP's planner as published, to compare with.

    quota_paper.py  Algorithm 1, strategy `quota_paper`

Training uses the quota planner instead, `balance/strategies/quota.py`.
"""
