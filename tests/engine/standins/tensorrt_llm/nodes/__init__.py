"""What the ranks of a job over several nodes run, and how the command they serve finds them.

The real ones are tensorrt_llm.llmapi.mgmn_leader_node and mgmn_worker_node.
"""
