//! One client connection and its broker connection while no frame of theirs needs a decision.

use std::collections::VecDeque;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::Arc;

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyBlockingIOError, PyInterruptedError, PyOSError, PyRuntimeError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};

use crate::program::{self, Found, Partition};
use crate::sockets::{monotonic_ns, receive, receive_timed, send, Io};
use crate::tally::{Lane, Program, Tally, Times};
use crate::turn::Clock;

const CLIENT: usize = 0;
const BROKER: usize = 1;
const REQUEST_HEAD: usize = 12; // size, API key, version, correlation id
const RESPONSE_HEAD: usize = 8; // size, correlation id
const MAX_USUAL: usize = 4; // of MAX_PREFIX bytes at most, and the texts in them
const MAX_PREFIX: usize = 512; // MAX_USUAL_PREFIX of kproxy/wire/client_side.py
const SPARE: usize = 256; // objects to use again, of a lane
const MAX_PASSED: usize = 16; // of program::MAX_NAMES bytes at most
const LATE_NS: i64 = 1_000_000; // as in kproxy/proxy/sockets/poller.py

/// A beginning that many requests of the connection have: API, version and the bytes of the first fields.
struct Usual {
    number: u64, // unique in the connection
    key_version: u32,
    prefix: Vec<u8>,
    plan: PyObject,   // ApiPlan
    values: PyObject, // of the first fields: client id, acks, ...
    max_wait_ms: Option<i64>,
    program: Py<Program>,
    tally: Py<Tally>,
    is_read: bool,                // its first fields are read, not only compared
    collects: Option<Py<Program>>, // reads the rest of the request; None: nothing of it is needed
    is_decided: bool,             // by the names that are collected; else all such requests pass
    is_counted: bool,             // the records of each topic-partition are
}

impl Usual {
    /// The kind of a request whose first fields are not known.
    fn of((plan, values, max_wait_ms, program, tally, is_counted): Given) -> Self {
        Usual {
            number: 0,
            key_version: 0,
            prefix: Vec::new(),
            plan,
            values,
            max_wait_ms,
            program,
            tally,
            is_read: false,
            collects: None,
            is_decided: false,
            is_counted,
        }
    }
}

/// The memory of what a pending request carries.
fn kept_bytes(found: &Found) -> usize {
    found.names.len() + found.partitions.len() * std::mem::size_of::<Partition>()
}

fn found_of(partitions: Vec<GivenPartition>) -> Found {
    let mut found = Found::default();
    for (topic, index, bytes, batches, records, codecs) in partitions {
        let start = found.names.len();
        found.names.extend_from_slice(&topic);
        let topic = (start, start + topic.len());
        found.partitions.push(Partition { topic, index, bytes, batches, records, codecs, offset: -1 });
    }
    found
}

/// What was collected of each topic-partition, as tuples.
pub fn as_tuples<'py>(py: Python<'py>, found: &Found) -> PyResult<Bound<'py, PyList>> {
    let tuples = PyList::empty_bound(py);
    for each in &found.partitions {
        let topic = PyBytes::new_bound(py, found.topic(each));
        tuples.append((topic, each.index, each.bytes, each.batches, each.records, each.codecs, each.offset))?;
    }
    Ok(tuples)
}

/// A request that is not answered.
struct Pending {
    usual: Arc<Usual>,
    correlation_id: u32,
    number: i64,
    request_bytes: i64,
    start: i64,
    end: Option<i64>, // None: its last byte has not arrived
    found: Option<Box<Found>>, // what it carries, where that is counted
}

/// Why the connection leaves the lane.
#[derive(Clone, Copy, PartialEq)]
enum Leave {
    No,
    Frame,      // the next frame is Python's
    Unsent,     // the other side does not take all bytes
    Ended,      // the side has ended
    Broken,     // the side cannot be read
    Unwritable, // the other side cannot be written
}

/// Why the reading of requests stops.
#[derive(PartialEq)]
enum Step {
    Done,
    Learn, // Python must be asked about the first fields of the request at `pos`
    Decide, // Python must be asked about the names in the request at `pos`
    Wait,  // for the rest of the frame at `pos`
    Leave, // Python must read the frame at `pos`
}

type State<'py> = (Bound<'py, PyList>, i64, (u64, u64), (u64, u64), i64, usize, i64, Option<PyObject>, Parts<'py>);
type Parts<'py> = Vec<Option<(Bound<'py, PyBytes>, i64)>>;
type Learnt = Option<(usize, Given, bool, Option<Py<Program>>, bool)>;
type Given = (PyObject, PyObject, Option<i64>, Py<Program>, Py<Tally>, bool);
type GivenPending = (Given, u32, i64, i64, i64, i64, Option<Vec<GivenPartition>>);
type GivenPartition = (Vec<u8>, i32, i64, i64, i64, i64);

#[pyclass]
pub struct Conn {
    lane: Py<Lane>,
    fds: [i32; 2],
    sends: [Option<PyObject>; 2], // of sides with TLS: Python's function that encrypts and sends; None: the socket's
    max_request: u32,
    limit: usize,
    lending: PyObject, // kproxy/proxy/relay/compiled.py; it has `learn`, `came_back`, `report_slow` and `crashed`
    pending: VecDeque<Pending>,
    usual: Vec<Arc<Usual>>,
    learnt: u64,                  // how many there were
    passed: Vec<(u64, Vec<u8>)>,  // names that the authorizer lets pass: the usual beginning's number, and the bytes
    asked: Option<Arc<Usual>>, // of the request about whose names Python is asked: they are in `found`
    found: Found,                 // in the request that is read
    number: i64,
    received: [u64; 2],
    completed: [u64; 2],
    free_at: i64,
    left: usize, // bytes of the request in transit that have not arrived
    parts: [Part; 2],
    session_ns: i64,
    is_inside: bool,
    last: Option<Arc<Usual>>, // of the last request whose first fields are read
}

/// The first bytes of a frame, which wait for the others.
#[derive(Default)]
struct Part {
    bytes: Vec<u8>,
    since: i64,   // when the first of them was read, by the session's clock
    arrived: i64, // when the last of them arrived, by the monotonic clock
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// What Python goes on with.
struct Left {
    unsent: Option<Vec<u8>>, // read, and not taken by the other side
    rest: Option<Vec<u8>>,   // not read: it begins with a frame, or its continuation
    frames: u64,             // that ended in this read
    arrived: i64,
    why: Leave,
    errno: i32,
}

/// Bytes of a side in the lane's buffer: `kept` of them waited for the others.
struct Read<'py> {
    kept: usize,
    count: usize,
    arrived: i64,
    given: Option<&'py Bound<'py, PyAny>>, // Python's view of those that did not wait; None: the core received them
}

/// Sends bytes by Python's function.
fn send_by(py: Python<'_>, send: &PyObject, piece: Bound<'_, PyAny>) -> PyResult<Io> {
    match send.call1(py, (piece,)) {
        Ok(sent) => Ok(Io::Done(sent.extract(py)?)),
        Err(fault) if fault.is_instance_of::<PyBlockingIOError>(py) => Ok(Io::Later),
        Err(fault) if fault.is_instance_of::<PyInterruptedError>(py) => Ok(Io::Later),
        Err(fault) if fault.is_instance_of::<PyOSError>(py) => Ok(Io::Failed(0)),
        Err(fault) => Err(fault),
    }
}

struct Slow {
    pending: Pending,
    times: Times,
    response_bytes: i64,
    duration: i64,
}

impl Conn {
    /// Reads requests from `pos` on, of which the first has arrived since `since`; returns why it stops.
    fn requests(&mut self, bytes: &[u8], pos: &mut usize, since: i64, now: i64, lane: &mut Lane) -> Step {
        let size = bytes.len();
        if self.left > 0 {
            let taken = self.left.min(size);
            self.left -= taken;
            *pos += taken;
            if self.left == 0 {
                if let Some(last) = self.pending.back_mut() {
                    last.end = Some(now);
                }
                self.completed[CLIENT] += 1;
            }
        }
        while size - *pos >= REQUEST_HEAD {
            let head = &bytes[*pos..];
            let length = u32_at(head, 0);
            if length < 8 || length > self.max_request || self.pending.len() >= self.limit {
                return Step::Leave;
            }
            let whole = length as usize + 4;
            let key_version = u32_at(head, 4);
            let found = self.usual.iter().position(|usual| {
                let until = REQUEST_HEAD + usual.prefix.len();
                usual.key_version == key_version
                    && until <= whole
                    && head.get(REQUEST_HEAD..until) == Some(usual.prefix.as_slice())
            });
            let usual = match found {
                Some(index) => &self.usual[index],
                None if head.len() < whole.min(REQUEST_HEAD + MAX_PREFIX) => return Step::Wait, // for its first fields
                None => return Step::Learn,
            };
            let mut found = None;
            if let Some(program) = &usual.collects {
                let body = match head.get(REQUEST_HEAD..whole) {
                    Some(body) => body,
                    None if whole <= lane.max_part => return Step::Wait,
                    None => return Step::Leave,
                };
                if !program::collects(&program.get().operations, body, &mut self.found) {
                    return Step::Leave;
                }
                let names = &self.found.names;
                if usual.is_decided
                    && !self.passed.iter().any(|(number, passed)| *number == usual.number && passed == names)
                {
                    self.asked = Some(usual.clone());
                    return Step::Decide;
                }
                if usual.is_counted {
                    let kept = kept_bytes(&self.found);
                    if lane.part_bytes + kept > lane.max_parts {
                        return Step::Leave;
                    }
                    lane.part_bytes += kept;
                    let mut spare = lane.spare.pop().unwrap_or_default();
                    std::mem::swap(&mut *spare, &mut self.found);
                    found = Some(spare);
                }
            }
            let here = whole.min(head.len());
            let end = if here == whole { Some(now) } else { None };
            self.pending.push_back(Pending {
                usual: usual.clone(),
                correlation_id: u32_at(head, 8),
                number: self.number,
                request_bytes: whole as i64,
                start: if *pos == 0 { since } else { now },
                end,
                found,
            });
            if usual.is_read && !self.last.as_ref().map_or(false, |last| Arc::ptr_eq(last, usual)) {
                self.last = Some(usual.clone());
            }
            self.number += 1;
            *pos += here;
            if end.is_none() {
                self.left = whole - here;
                return Step::Done;
            }
            self.completed[CLIENT] += 1;
        }
        if *pos < size {
            Step::Wait
        } else {
            Step::Done
        }
    }

    /// Reads answers from `pos` on, of which the first has arrived since `since`; returns why it stops.
    fn answers(
        &mut self,
        py: Python<'_>,
        lane: &mut Lane,
        bytes: &[u8],
        pos: &mut usize,
        (since, now): (i64, i64),
        slow: &mut Vec<Slow>,
    ) -> Step {
        while bytes.len() - *pos >= RESPONSE_HEAD {
            let head = &bytes[*pos..];
            let whole = u32_at(head, 0) as usize + 4;
            let first = match self.pending.front() {
                Some(first) if first.correlation_id == u32_at(head, 4) && first.end.is_some() => first,
                _ => return Step::Leave,
            };
            if whole > head.len() && whole <= lane.max_part {
                return Step::Wait;
            }
            let body = match head.get(RESPONSE_HEAD..whole) {
                Some(body) => body,
                None => return Step::Leave,
            };
            let program = &first.usual.program;
            let is_plain = if first.found.is_some() {
                program::collects(&program.get().operations, body, &mut self.found)
            } else {
                lane.is_plain(py, program, body)
            };
            if !is_plain {
                return Step::Leave;
            }
            let mut pending = match self.pending.pop_front() {
                Some(pending) => pending,
                None => return Step::Leave,
            };
            let response_start = if *pos == 0 { since } else { now };
            let queue = (self.free_at.min(response_start) - pending.start).max(0);
            self.free_at = now;
            self.completed[BROKER] += 1;
            let times = Times {
                request_start: pending.start,
                request_end: pending.end.unwrap_or(now),
                response_start,
                response_end: now,
                queue,
            };
            let usual = &pending.usual;
            let mut tally = usual.tally.borrow_mut(py);
            if !tally.is_fresh {
                tally.is_fresh = true;
                lane.fresh.push(usual.tally.clone_ref(py));
            }
            let duration = tally.count(pending.request_bytes, whole as i64, &times, usual.max_wait_ms);
            if let Some(asked) = pending.found.take() {
                lane.part_bytes -= kept_bytes(&asked);
                tally.count_records(&asked, &self.found, &times);
                if lane.spare.len() < SPARE {
                    lane.spare.push(asked);
                }
            }
            drop(tally);
            if duration - usual.max_wait_ms.unwrap_or(0) * 1_000_000 > lane.slow_ns {
                slow.push(Slow { pending, times, response_bytes: whole as i64, duration });
            }
            *pos += whole;
        }
        if *pos < bytes.len() {
            Step::Wait
        } else {
            Step::Done
        }
    }

    /// Lets the first bytes of a frame wait for the others; false: there is no room for them.
    fn keep(&mut self, lane: &mut Lane, side: usize, bytes: &[u8], since: i64, arrived: i64) -> bool {
        if bytes.len() > lane.max_part || lane.part_bytes + bytes.len() > lane.max_parts {
            return false;
        }
        lane.part_bytes += bytes.len();
        let part = &mut self.parts[side];
        part.bytes.extend_from_slice(bytes);
        part.since = since;
        part.arrived = arrived;
        true
    }

    /// Asks Python about the request that begins at `frame`; false: the request is Python's.
    fn learn_at(slf: &Bound<'_, Self>, frame: &[u8]) -> PyResult<bool> {
        let py = slf.py();
        let whole = u32_at(frame, 0) as usize + 4;
        let part = &frame[..whole.min(frame.len()).min(REQUEST_HEAD + MAX_PREFIX)];
        let lending = slf.borrow().lending.clone_ref(py);
        let learnt = lending.call_method1(py, intern!(py, "learn"), (PyBytes::new_bound(py, part),))?;
        let found: Learnt = learnt.extract(py)?;
        let (prefix_bytes, given, is_read, collects, is_decided) = match found {
            Some(found) => found,
            None => return Ok(false),
        };
        let prefix = match part.get(REQUEST_HEAD..REQUEST_HEAD + prefix_bytes) {
            Some(prefix) => prefix,
            None => return Ok(false),
        };
        let mut me = slf.borrow_mut();
        if me.usual.len() >= MAX_USUAL {
            me.usual.remove(0);
        }
        let key_version = u32_at(frame, 4);
        let prefix = prefix.to_vec();
        me.learnt += 1;
        let number = me.learnt;
        let usual = Usual { number, key_version, prefix, is_read, collects, is_decided, ..Usual::of(given) };
        me.usual.push(Arc::new(usual));
        Ok(true)
    }

    /// Asks Python whether requests with the names of the one that begins at `frame` pass; false: it is Python's.
    fn decide_at(slf: &Bound<'_, Self>, frame: &[u8]) -> PyResult<bool> {
        let py = slf.py();
        let whole = u32_at(frame, 0) as usize + 4;
        let (lending, plan) = {
            let me = slf.borrow();
            let plan = match &me.asked {
                Some(usual) => usual.plan.clone_ref(py),
                None => return Ok(false),
            };
            (me.lending.clone_ref(py), plan)
        };
        let said = (plan, PyBytes::new_bound(py, &frame[..whole.min(frame.len())]));
        let passes: bool = lending.call_method1(py, intern!(py, "passes"), said)?.extract(py)?;
        let mut me = slf.borrow_mut();
        match me.asked.take() {
            Some(usual) if passes => {
                if me.passed.len() >= MAX_PASSED {
                    me.passed.remove(0);
                }
                let names = me.found.names.clone();
                me.passed.push((usual.number, names));
            }
            _ => {}
        }
        Ok(passes)
    }

    /// Relays what a side has sent. A defect here, or in Python that was asked, ends this connection and no other.
    fn readable(slf: &Bound<'_, Self>, side: usize, lane: &Bound<'_, Lane>, clock: &mut Clock) -> PyResult<()> {
        if !slf.borrow().is_inside {
            return Ok(());
        }
        Self::with_buffer(slf, side, lane, clock, |buffer, clock| Self::relay(slf, lane, side, clock, buffer))
    }

    /// Does `work` with the lane's buffer; gives the connection back to Python if it must leave the lane.
    fn with_buffer(
        slf: &Bound<'_, Self>,
        side: usize,
        lane: &Bound<'_, Lane>,
        clock: &mut Clock,
        work: impl FnOnce(&mut Vec<u8>, &mut Clock) -> PyResult<Option<Left>>,
    ) -> PyResult<()> {
        let py = slf.py();
        let mut buffer = std::mem::take(&mut lane.borrow_mut().buffer);
        let result = catch_unwind(AssertUnwindSafe(|| work(&mut buffer, clock)));
        lane.borrow_mut().buffer = buffer;
        let left = match result {
            Ok(Ok(None)) => return Ok(()),
            Ok(Ok(Some(left))) => left,
            Ok(Err(fault)) => return Self::crashed(slf, fault),
            Err(_) => return Self::crashed(slf, PyRuntimeError::new_err("a panic of the compiled core")),
        };
        clock.write(&lane.borrow(), py)?;
        let lending = slf.borrow().lending.clone_ref(py);
        let unsent = left.unsent.map(|bytes| PyBytes::new_bound(py, &bytes));
        let rest = left.rest.map(|bytes| PyBytes::new_bound(py, &bytes));
        let said = (side, unsent, rest, left.frames, left.arrived, left.why as u8, left.errno);
        lending.call_method1(py, intern!(py, "came_back"), said)?;
        clock.read(&lane.borrow(), py)
    }

    fn crashed(slf: &Bound<'_, Self>, fault: PyErr) -> PyResult<()> {
        let py = slf.py();
        let lending = slf.borrow().lending.clone_ref(py);
        lending.call_method1(py, intern!(py, "crashed"), (fault.into_value(py),))?;
        Ok(())
    }

    fn relay(
        slf: &Bound<'_, Self>,
        lane: &Bound<'_, Lane>,
        side: usize,
        clock: &mut Clock,
        buffer: &mut [u8],
    ) -> PyResult<Option<Left>> {
        let start = clock.now;
        let (fd, kept) = {
            let me = slf.borrow();
            (me.fds[side], me.parts[side].bytes.len())
        };
        let room = (kept + clock.room).min(buffer.len());
        let mut arrived = clock.turn;
        let read = if clock.is_late {
            let (read, wall_ns) = receive_timed(fd, &mut buffer[kept..room]);
            if let (Some(wall_ns), Io::Done(_)) = (wall_ns, &read) {
                arrived = (wall_ns - clock.wall_offset).min(start);
                if clock.is_in_order && clock.turn - arrived <= LATE_NS {
                    clock.is_late = false; // sockets that became ready later are as recent
                }
            }
            read
        } else {
            receive(fd, &mut buffer[kept..room])
        };
        let over = |why, errno| Some(Left { unsent: None, rest: None, frames: 0, arrived, why, errno });
        let count = match read {
            Io::Later => return Ok(None),
            Io::Failed(errno) => return Ok(over(Leave::Broken, errno)),
            Io::Done(0) if kept > 0 => return Ok(over(Leave::Frame, 0)), // Python reads the part, and then the end
            Io::Done(0) => return Ok(over(Leave::Ended, 0)),
            Io::Done(count) => kept + count,
        };
        Self::pass_on(slf, lane, side, clock, buffer, Read { kept, count, arrived, given: None })
    }

    /// Reads the frames in the buffer, and sends them to the other side.
    fn pass_on(
        slf: &Bound<'_, Self>,
        lane: &Bound<'_, Lane>,
        side: usize,
        clock: &mut Clock,
        buffer: &mut [u8],
        Read { kept, count, arrived, given }: Read<'_>,
    ) -> PyResult<Option<Left>> {
        let py = slf.py();
        let start = clock.now;
        let mut why = Leave::No;
        let mut slow = Vec::new();
        let mut pos = 0;
        let mut step = Step::Done;
        let before;
        let now;
        let since;
        if kept > 0 {
            let mut me = slf.borrow_mut();
            let part = std::mem::take(&mut me.parts[side]);
            buffer[..kept].copy_from_slice(&part.bytes);
            lane.borrow_mut().part_bytes -= kept;
            since = Some(part.since);
        } else {
            since = None;
        }
        let bytes = &buffer[..count];
        {
            let mut lane = lane.borrow_mut();
            lane.lag.add(start - arrived, 1);
            let mut me = slf.borrow_mut();
            before = me.completed[side];
            // The broker's time begins when kproxy handles the request, and ends when the answer arrives.
            let at = if side == CLIENT { start } else { arrived.max(me.session_ns) };
            me.session_ns = at;
            now = at + lane.clock_offset_ns;
            if side == BROKER {
                step = me.answers(py, &mut lane, bytes, &mut pos, (since.unwrap_or(now), now), &mut slow);
            }
        }
        if side == CLIENT {
            loop {
                step = slf.borrow_mut().requests(bytes, &mut pos, since.unwrap_or(now), now, &mut lane.borrow_mut());
                let goes_on = match step {
                    Step::Learn => Self::learn_at(slf, &bytes[pos..])?,
                    Step::Decide => Self::decide_at(slf, &bytes[pos..])?,
                    _ => break,
                };
                if !goes_on {
                    step = Step::Leave;
                    break;
                }
            }
        }
        if step == Step::Leave {
            why = Leave::Frame;
        }
        let mut sent = pos;
        if pos > 0 {
            let (to, by) = {
                let me = slf.borrow();
                (me.fds[1 - side], me.sends[1 - side].as_ref().map(|send| send.clone_ref(py)))
            };
            let outcome = match (by, given) {
                (None, _) => send(to, &bytes[..pos]),
                (Some(by), Some(given)) if kept == 0 && pos == count => send_by(py, &by, given.clone())?,
                (Some(by), _) => send_by(py, &by, PyBytes::new_bound(py, &bytes[..pos]).into_any())?,
            };
            match outcome {
                Io::Done(done) => sent = done,
                Io::Later => sent = 0,
                Io::Failed(_) => why = Leave::Unwritable,
            }
            if sent < pos {
                why = Leave::Unsent;
            }
        }
        clock.now = monotonic_ns();
        let frames;
        {
            let mut lane = lane.borrow_mut();
            let mut me = slf.borrow_mut();
            me.received[side] += pos as u64;
            frames = me.completed[side] - before;
            if sent == pos && frames > 0 {
                lane.inside[side].add(clock.now - arrived, frames);
            }
            if step == Step::Wait && why == Leave::No {
                let since = if pos == 0 { since.unwrap_or(now) } else { now };
                if !me.keep(&mut lane, side, &bytes[pos..], since, arrived) {
                    why = Leave::Frame;
                }
            }
        }
        for each in slow {
            Self::report_slow(slf, lane, each)?;
        }
        if why == Leave::No {
            return Ok(None);
        }
        let unsent = if sent < pos { Some(bytes[sent..pos].to_vec()) } else { None };
        let rest = if pos < count { Some(bytes[pos..].to_vec()) } else { None };
        Ok(Some(Left { unsent, rest, frames, arrived, why, errno: 0 }))
    }

    /// Returns what waits for the rest of its frame, by side, and counts it no more.
    fn drop_parts(&mut self, py: Python<'_>) -> [Part; 2] {
        let parts = std::mem::take(&mut self.parts);
        self.lane.borrow_mut(py).part_bytes -= parts[CLIENT].bytes.len() + parts[BROKER].bytes.len();
        parts
    }

    fn report_slow(slf: &Bound<'_, Self>, lane: &Bound<'_, Lane>, slow: Slow) -> PyResult<()> {
        let py = slf.py();
        let lending = slf.borrow().lending.clone_ref(py);
        let Pending { usual, correlation_id, number, request_bytes, start, end, .. } = slow.pending;
        let request = (correlation_id as i32, number, request_bytes, start, end.unwrap_or(start));
        let times = slow.times;
        let response =
            (slow.response_bytes, times.response_start, times.response_end, times.queue, slow.duration);
        let said = (&usual.plan, &usual.values, request, response);
        let above: i64 = lending.call_method1(py, intern!(py, "report_slow"), said)?.extract(py)?;
        lane.borrow_mut().slow_ns = above;
        Ok(())
    }
}

#[pymethods]
impl Conn {
    #[new]
    #[allow(clippy::too_many_arguments)]
    fn new(
        lane: Py<Lane>,
        fds: (i32, i32),
        sends: (Option<PyObject>, Option<PyObject>),
        max_request_bytes: u32,
        limit: usize,
        lending: PyObject,
    ) -> Self {
        Conn {
            lane,
            fds: [fds.0, fds.1],
            sends: [sends.0, sends.1],
            max_request: max_request_bytes,
            limit,
            lending,
            pending: VecDeque::new(),
            usual: Vec::new(),
            learnt: 0,
            passed: Vec::new(),
            asked: None,
            found: Found::default(),
            number: 0,
            received: [0, 0],
            completed: [0, 0],
            free_at: 0,
            left: 0,
            parts: Default::default(),
            session_ns: 0,
            is_inside: false,
            last: None,
        }
    }

    /// Takes the state of a session whose sides are between two frames.
    #[allow(clippy::too_many_arguments)]
    fn enter(
        &mut self,
        py: Python<'_>,
        pending: Vec<GivenPending>,
        number: i64,
        received: (u64, u64),
        completed: (u64, u64),
        free_at: i64,
        session_ns: i64,
    ) {
        self.pending.clear();
        self.usual.clear(); // what decides may have changed
        self.passed.clear();
        for (given, correlation_id, number, request_bytes, start, end, partitions) in pending {
            let usual = Arc::new(Usual::of(given));
            let found = partitions.map(|partitions| Box::new(found_of(partitions)));
            if let Some(found) = &found {
                self.lane.borrow_mut(py).part_bytes += kept_bytes(found);
            }
            let end = Some(end);
            self.pending.push_back(Pending { usual, correlation_id, number, request_bytes, start, end, found });
        }
        self.number = number;
        self.received = [received.0, received.1];
        self.completed = [completed.0, completed.1];
        self.free_at = free_at;
        self.session_ns = session_ns;
        self.left = 0;
        self.last = None;
        self.is_inside = true;
    }

    /// Gives the state back: pending requests as (plan, values, correlation id, number, bytes, start, end or None, what they
    /// carry or None), the number of the next one, bytes and frames by side, when the last answer ended, the bytes missing from the request
    /// in transit, the session's time, the first fields of the last request that had some to read, and by side what
    /// waits for the rest of its frame, with the time when it arrived.
    fn take<'py>(&mut self, py: Python<'py>) -> PyResult<State<'py>> {
        self.is_inside = false;
        let pending = PyList::empty_bound(py);
        for each in std::mem::take(&mut self.pending) {
            let partitions = match &each.found {
                Some(found) => {
                    self.lane.borrow_mut(py).part_bytes -= kept_bytes(found);
                    as_tuples(py, found)?.into_py(py)
                }
                None => py.None(),
            };
            pending.append(PyTuple::new_bound(
                py,
                &[
                    each.usual.plan.clone_ref(py),
                    each.usual.values.clone_ref(py),
                    (each.correlation_id as i32).into_py(py),
                    each.number.into_py(py),
                    each.request_bytes.into_py(py),
                    each.start.into_py(py),
                    each.end.into_py(py),
                    partitions,
                ],
            ))?;
        }
        let last = self.last.take().map(|usual| usual.values.clone_ref(py));
        let received = (self.received[0], self.received[1]);
        let completed = (self.completed[0], self.completed[1]);
        let parts = self.drop_parts(py);
        let parts = parts.map(|part| match part.bytes.is_empty() {
            true => None,
            false => Some((PyBytes::new_bound(py, &part.bytes), part.arrived)),
        });
        Ok((pending, self.number, received, completed, self.free_at, self.left, self.session_ns, last, parts.into()))
    }

    /// What is counted so far, without an end of the loan: requests, bytes by side with those that wait for the rest of
    /// their frame, the first fields of the last request that had some to read, and whether the oldest pending request
    /// is whole.
    fn counts(&self, py: Python<'_>) -> (i64, (u64, u64), Option<PyObject>, bool) {
        let last = self.last.as_ref().map(|usual| usual.values.clone_ref(py));
        let awaits_answer = self.pending.front().map_or(false, |pending| pending.end.is_some());
        let received = |side: usize| self.received[side] + self.parts[side].bytes.len() as u64;
        (self.number, (received(CLIENT), received(BROKER)), last, awaits_answer)
    }

    /// Lets go of Python's object: the connection is closed.
    fn end(&mut self, py: Python<'_>) {
        self.is_inside = false;
        self.drop_parts(py);
        self.lending = py.None();
        self.sends = [None, None];
        self.usual.clear();
        self.passed.clear();
        self.asked = None;
        let kept: usize = self.pending.iter().filter_map(|each| each.found.as_deref()).map(kept_bytes).sum();
        self.lane.borrow_mut(py).part_bytes -= kept;
        self.pending.clear();
    }

    /// Returns what the poller calls when a side is readable: 0 for the client's, 1 for the broker's.
    fn side(slf: &Bound<'_, Self>, side: usize) -> Side {
        Side { conn: slf.clone().unbind(), side: side.min(BROKER) }
    }

    /// Relays bytes of a side that Python has received, for example decrypted ones: `view` is valid during the call,
    /// and `arrived` in nanoseconds of the monotonic clock.
    fn feed(slf: &Bound<'_, Self>, side: usize, view: &Bound<'_, PyAny>, arrived: i64) -> PyResult<()> {
        let py = slf.py();
        let side = side.min(BROKER);
        let (lane, kept) = {
            let me = slf.borrow();
            if !me.is_inside {
                return Err(PyRuntimeError::new_err("the connection is not lent"));
            }
            (me.lane.clone_ref(py), me.parts[side].bytes.len())
        };
        let lane = lane.bind(py);
        let mut clock = Clock::of(&lane.borrow(), py)?;
        let bytes = PyBuffer::<u8>::get_bound(view)?;
        let count = kept + bytes.item_count();
        Self::with_buffer(slf, side, lane, &mut clock, |buffer, clock| {
            if buffer.len() < count {
                buffer.resize(count, 0);
            }
            bytes.copy_to_slice(py, &mut buffer[kept..count])?;
            Self::pass_on(slf, lane, side, clock, buffer, Read { kept, count, arrived, given: Some(view) })
        })?;
        let lane = lane.borrow();
        clock.write(&lane, py)
    }

    fn __len__(&self) -> usize {
        self.pending.len()
    }

    /// The object of Python that lends this connection refers to it. What requests have in common is not visited: more
    /// than one of them may hold it.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.lane)?;
        for send in self.sends.iter().flatten() {
            visit.call(send)?;
        }
        visit.call(&self.lending)
    }
}

/// A side of a connection, as the poller's reader of its socket.
#[pyclass(frozen)]
pub struct Side {
    conn: Py<Conn>,
    side: usize,
}

impl Side {
    pub fn read(&self, lane: &Bound<'_, Lane>, clock: &mut Clock) -> PyResult<()> {
        Conn::readable(self.conn.bind(lane.py()), self.side, lane, clock)
    }
}

#[pymethods]
impl Side {
    /// Reads in a turn that Python runs.
    fn __call__(&self, py: Python<'_>) -> PyResult<()> {
        let lane = self.conn.borrow(py).lane.clone_ref(py);
        let lane = lane.bind(py);
        let mut clock = Clock::of(&lane.borrow(), py)?;
        self.read(lane, &mut clock)?;
        let lane = lane.borrow();
        clock.write(&lane, py)
    }
}
