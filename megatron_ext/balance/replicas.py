"""Stages 4 and 8; see `slots.py`."""

from megatron_ext.balance.slots import Joint as Joint
from megatron_ext.balance.slots import MainWeights as MainWeights
from megatron_ext.balance.slots import MaterializeFunction as MaterializeFunction
from megatron_ext.balance.slots import Materializing as Materializing
from megatron_ext.balance.slots import Reducing as Reducing
from megatron_ext.balance.slots import RematerializeFunction as RematerializeFunction
from megatron_ext.balance.slots import Replication as Replication
from megatron_ext.balance.slots import Segment as Segment
from megatron_ext.balance.slots import SentAhead as SentAhead
from megatron_ext.balance.slots import SlotBuffers as SlotBuffers
from megatron_ext.balance.slots import StartRematerializeFunction as StartRematerializeFunction
from megatron_ext.balance.slots import join_later as join_later
from megatron_ext.balance.slots import shared_slot_buffers as shared_slot_buffers
