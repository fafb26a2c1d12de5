"""processor: scoring inside coffea's processors."""

from sonic_coffea.processor._mixin import Request as Request
from sonic_coffea.processor._mixin import Scores as Scores
from sonic_coffea.processor._mixin import SonicFilter as SonicFilter
from sonic_coffea.processor._mixin import SonicProcessor as SonicProcessor
from sonic_coffea.processor._run import EVENT_ID as EVENT_ID
from sonic_coffea.processor._run import chunk_name as chunk_name
from sonic_coffea.processor._run import located as located
from sonic_coffea.processor._run import run_files as run_files
