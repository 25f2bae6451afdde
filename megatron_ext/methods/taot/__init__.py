"""TAOT: replicas near their homes, hinted at by optimal transport between ranks."""
