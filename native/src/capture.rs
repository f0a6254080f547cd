//! Exchanges of captured connections, read from segments that are in order.
//!
//! Only complete requests that begin like an earlier one of the connection, and complete answers to them, in turn. At the
//! first frame that is not like that a connection is left to its Python session, which decides (`kproxy/capture/columns/`
//! has the other half of this).

use std::collections::HashMap;

use pyo3::buffer::{PyBuffer, ReadOnlyCell};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyDict, PyList};

use crate::bodies::{self, Bodies, Found};
use crate::rope::{Rope, Segments};

const CLIENT: usize = 0;
const BROKER: usize = 1;
const HEADS: [usize; 2] = [12, 8]; // bytes up to and with the correlation id, as in kproxy/wire/frames.py
const LEAST: [usize; 2] = [12, 8];
const MOST: [usize; 2] = [4 + 100 * 1024 * 1024, 1 << 31];

/// The most exchanges that a session reads before the core goes on.
const MOST_APART: usize = 32;

/// The numeric columns of an exchange, in this order (`COLUMNS` of kproxy/capture/columns/pairs.py).
const COLUMNS: usize = 16;

/// What is read of the frames of one API and version.
struct Kind {
    programs: [Option<Vec<u32>>; 2],
    only_fine: bool,     // an answer with an error is the session's
    may_have_logs: bool, // an answer with records of coordinators' logs is the session's
}

/// How requests of one API and version begin on a connection: (key and version, bytes up to the prefix's end, prefix,
/// number of the prefix).
type Opening = (u32, usize, Vec<u8>, i64);

/// A connection's segments, from the first to the one before the last, and where its session stands.
#[derive(FromPyObject)]
struct Part {
    low: usize,
    high: usize,
    flip: usize,
    number: i64,
    free_at: i64,
    missing: (usize, usize),
    pending: Vec<i32>,
    openings: Vec<Opening>,
}

#[derive(Clone)]
struct Frame<'a> {
    begin: Rope<'a>, // its first byte
    end: Rope<'a>,
    size: usize,
    first: usize, // segments: with the first byte,
    head: usize,  // with the last byte of the header,
    last: usize,  // and with the last byte
}

/// The exchanges of one API and version.
#[derive(Default)]
struct Group {
    columns: [Vec<i64>; COLUMNS],
    bodies: [Bodies; 2],
}

/// Where a direction goes on: a segment and the offset in it; None: in later segments.
type Place = Option<(usize, usize)>;
type Places = (Place, Place);

/// What was read of a part: see `Reader.read`.
type Taken = (usize, Places, Places, Option<Places>, Vec<usize>, (usize, usize), i64, i64);

#[pyclass]
pub struct Reader {
    most_pending: usize,
    many_rows: usize,
    kinds: HashMap<u32, Kind>,
}

#[pymethods]
impl Reader {
    /// most_pending: of a session, which gives up the oldest of so many requests. many_rows: of exchanges and
    /// topic-partitions. With so many, `read` ends where a connection has no request in flight; with twice as many,
    /// anywhere.
    #[new]
    fn new(most_pending: usize, many_rows: usize) -> Self {
        Reader { most_pending, many_rows, kinds: HashMap::new() }
    }

    /// Learns to read frames of one API and version; None: their bodies are not read.
    #[pyo3(signature = (key_version, request, response, only_fine, may_have_logs))]
    fn learn(
        &mut self,
        key_version: u32,
        request: Option<Vec<u32>>,
        response: Option<Vec<u32>>,
        only_fine: bool,
        may_have_logs: bool,
    ) -> PyResult<()> {
        let programs = [request, response];
        if programs.iter().flatten().any(|program| !bodies::is_sound(program)) {
            return Err(PyValueError::new_err("the program has an unknown or incomplete operation"));
        }
        self.kinds.insert(key_version, Kind { programs, only_fine, may_have_logs });
        Ok(())
    }

    /// Reads the exchanges at the beginning of each part; returns (what was taken of each part, groups, whether
    /// they have many rows: then later parts may be missing).
    ///
    /// segments: columns of int64: side, start, end in the window, time. is_log: whether records of a topic (name, id) are
    /// those of a coordinator.
    ///
    /// Of a part: how many exchanges; the places of both sides before the first and behind the last of them; those behind
    /// the next exchange, if it is apart from later ones; the segments of its answers; the bytes of both sides; when
    /// the last answer ended; and the number of the last request's prefix. A group: see `Group::into_python`.
    fn read<'py>(
        &self,
        py: Python<'py>,
        window: &Bound<'py, PyAny>,
        segments: Vec<PyBuffer<i64>>,
        parts: Vec<Part>,
        is_log: &Bound<'py, PyAny>,
    ) -> PyResult<(Vec<Taken>, Bound<'py, PyList>, bool)> {
        let window = PyBuffer::<u8>::get_bound(window)?;
        let window = bytes_of(py, &window)?;
        let mut columns: Vec<Vec<i64>> = Vec::new();
        for column in &segments {
            columns.push(column.to_vec(py)?);
        }
        if columns.len() != 4 {
            return Err(PyValueError::new_err("a segment has four columns"));
        }
        let (side, start, end, time_ns) = (&columns[0], &columns[1], &columns[2], &columns[3]);
        let segments = Segments { window, side, start, end, time_ns };
        if !segments.are_sound() || parts.iter().any(|part| part.high > side.len()) {
            return Err(PyValueError::new_err("a segment is beyond the window"));
        }
        let mut reading = Reading {
            reader: self,
            segments: &segments,
            is_log,
            groups: HashMap::new(),
            logs: HashMap::new(),
            rows: 0,
        };
        let mut taken = Vec::with_capacity(parts.len());
        for (place, part) in parts.iter().enumerate() {
            taken.push(reading.part(place as i64, part)?);
            if reading.rows >= self.many_rows {
                break;
            }
        }
        let is_full = reading.rows >= self.many_rows;
        let groups = PyList::empty_bound(py);
        let mut found: Vec<_> = reading.groups.into_iter().collect();
        found.sort_by_key(|(key_version, _)| *key_version);
        for (key_version, group) in found {
            if !group.columns[0].is_empty() {
                groups.append(group.into_python(py, key_version, &self.kinds[&key_version])?)?;
            }
        }
        Ok((taken, groups, is_full))
    }
}

fn bytes_of<'a>(py: Python<'a>, window: &'a PyBuffer<u8>) -> PyResult<&'a [ReadOnlyCell<u8>]> {
    window.as_slice(py).ok_or_else(|| PyValueError::new_err("the window is not contiguous"))
}

/// The complete frames of a direction, found as far as they are asked for.
struct Lane<'a> {
    rope: Rope<'a>,
    side: usize,
    found: Vec<Frame<'a>>,
    is_over: bool,
}

impl<'a> Lane<'a> {
    /// missing: the bytes before the first frame.
    fn new(mut rope: Rope<'a>, side: usize, missing: usize) -> Self {
        let is_over = rope.skip(missing).is_none();
        Lane { rope, side, found: Vec::new(), is_over }
    }

    fn frame(&mut self, index: usize) -> Option<&Frame<'a>> {
        while index >= self.found.len() && !self.is_over {
            match self.next() {
                Some(frame) => self.found.push(frame),
                None => self.is_over = true,
            }
        }
        self.found.get(index)
    }

    fn next(&mut self) -> Option<Frame<'a>> {
        let begin = self.rope;
        let size = (4 + self.rope.number(4)?).max(0) as usize;
        if size < LEAST[self.side] || size > MOST[self.side] {
            return None;
        }
        let (first, head, last) = (begin.segment(0)?, begin.segment(HEADS[self.side] - 1)?, begin.segment(size - 1)?);
        self.rope = begin;
        self.rope.skip(size)?;
        Some(Frame { begin, end: self.rope, size, first, head, last })
    }

    /// How many frames have their header before a segment, or `most`; `counted`: that many have.
    fn before(&mut self, segment: usize, counted: usize, most: usize) -> usize {
        let mut count = counted;
        while count < most && self.frame(count).map_or(false, |frame| frame.head < segment) {
            count += 1;
        }
        count
    }
}

struct Reading<'a, 'py> {
    reader: &'a Reader,
    segments: &'a Segments<'a>,
    is_log: &'a Bound<'py, PyAny>,
    groups: HashMap<u32, Group>,
    logs: HashMap<(u32, usize), bool>, // by group and topic
    rows: usize,                       // in all groups
}

impl Reading<'_, '_> {
    fn part(&mut self, place: i64, part: &Part) -> PyResult<Taken> {
        let rope = |side: usize| Rope::new(self.segments, side ^ part.flip, part.low, part.high);
        let mut requests = Lane::new(rope(CLIENT), CLIENT, part.missing.0);
        let mut answers = Lane::new(rope(BROKER), BROKER, part.missing.1);
        let waiting = part.pending.len();
        let (mut taken, mut free_at, mut asked, mut answered) = (0, part.free_at, 0, 0);
        let mut opening = -1;
        let mut goes_on = true;
        for (place, id) in part.pending.iter().enumerate() {
            goes_on &= answers.frame(place).map_or(false, |answer| correlation_id(answer, BROKER) == Some(*id));
        }
        let mut is_full = false;
        while goes_on && !is_full {
            let (request, response) = match (requests.frame(taken), answers.frame(waiting + taken)) {
                (Some(request), Some(response)) => (request.clone(), response.clone()),
                _ => break,
            };
            asked = requests.before(response.head, asked, taken + self.reader.most_pending);
            answered = answers.before(request.head, answered, waiting + taken);
            let in_flight = (waiting + taken).saturating_sub(answered);
            if in_flight.max(asked.saturating_sub(taken)) + 1 >= self.reader.most_pending {
                break;
            }
            let number = part.number + taken as i64;
            let pair =
                Pair { place, number, request: &request, response: &response, in_flight: in_flight as i64, free_at };
            let found = self.pair(&pair, &part.openings)?;
            goes_on = found.is_some();
            if let Some(number) = found {
                opening = number;
                free_at = self.segments.time_ns[response.last];
                taken += 1;
                is_full = self.rows >= 2 * self.reader.many_rows
                    || self.rows >= self.reader.many_rows
                        && requests.frame(taken).map_or(false, |next| next.head > response.head);
            }
        }
        let (mut begin, mut end) = ((None, None), (None, None));
        if taken > 0 {
            let (requests, responses) = (&requests.found, &answers.found[waiting..]);
            begin = (requests[0].begin.place(), responses[0].begin.place());
            end = (requests[taken - 1].end.place(), responses[taken - 1].end.place());
        }
        let behind_next = match is_full && self.rows < 2 * self.reader.many_rows {
            true => Some(end),
            false => rest(&mut requests, &mut answers, taken, waiting),
        };
        let heads = answers.found.iter().take(waiting + taken).map(|answer| answer.head).collect();
        let read = (
            requests.found.iter().take(taken).map(|frame| frame.size).sum(),
            answers.found.iter().skip(waiting).take(taken).map(|frame| frame.size).sum(),
        );
        Ok((taken, begin, end, behind_next, heads, read, free_at, opening))
    }

    /// Reads an exchange into its group, and returns the number of its prefix; None: it is the session's.
    fn pair(&mut self, pair: &Pair<'_, '_>, openings: &[Opening]) -> PyResult<Option<i64>> {
        let mut rope = pair.request.begin.cut(pair.request.size);
        if rope.skip(4).is_none() || !is_paired(pair.request, pair.response) {
            return Ok(None);
        }
        let key_version = rope.number(4).unwrap_or(-1) as u32;
        let id = rope.number(4).unwrap_or(-1);
        let (kind, opening) =
            match (self.reader.kinds.get(&key_version), openings.iter().find(|each| each.0 == key_version)) {
                (Some(kind), Some((_, size, prefix, opening)))
                    if pair.request.size >= *size && rope.begins_with(prefix) =>
                {
                    (kind, *opening)
                }
                _ => return Ok(None),
            };
        let group = self.groups.entry(key_version).or_default();
        let row = group.columns[0].len() as i64;
        let marks = [group.bodies[CLIENT].mark(), group.bodies[BROKER].mark()];
        let mut found: [Option<Found>; 2] = [None, None];
        let mut fits = true;
        for (side, frame) in [pair.request, pair.response].into_iter().enumerate() {
            if let Some(program) = &kind.programs[side] {
                let mut body = frame.begin.cut(frame.size);
                found[side] =
                    body.skip(HEADS[side]).and_then(|()| bodies::read(program, body, &mut group.bodies[side], row));
                fits &= found[side].is_some();
            }
            if !fits {
                break;
            }
        }
        let [asked, answered] = found;
        let number_of =
            |found: &Option<Found>, place: usize, none: i64| found.as_ref().map_or(none, |found| found.numbers[place]);
        let error_code = number_of(&answered, bodies::ERROR_CODE, bodies::NULL);
        fits &= !(kind.only_fine && error_code != bodies::NULL && error_code != 0);
        if fits && kind.may_have_logs {
            let mut topics: Vec<usize> = group.bodies[BROKER].topics_with_records(marks[BROKER]).collect();
            topics.dedup();
            for topic in topics {
                let is_log = match self.logs.get(&(key_version, topic)) {
                    Some(known) => *known,
                    None => {
                        let (name, id) = &group.bodies[BROKER].topics.values[topic];
                        self.is_log.call1((name.as_deref(), id.as_deref()))?.extract()?
                    }
                };
                self.logs.insert((key_version, topic), is_log);
                fits &= !is_log;
            }
        }
        if !fits {
            group.bodies[CLIENT].truncate(marks[CLIENT]);
            group.bodies[BROKER].truncate(marks[BROKER]);
            return Ok(None);
        }
        let clock = self.segments.time_ns;
        let (request, response) = (pair.request, pair.response);
        let (request_start, response_start) = (clock[request.first], clock[response.first]);
        let has_rack = asked.as_ref().map_or(false, |found| found.has_rack());
        let values: [i64; COLUMNS] = [
            pair.place,
            opening,
            pair.number,
            request_start,
            clock[request.last],
            response_start,
            clock[response.last],
            (pair.free_at.min(response_start) - request_start).max(0),
            id,
            request.size as i64,
            response.size as i64,
            error_code,
            number_of(&asked, bodies::REPLICA_ID, -1),
            i64::from(has_rack),
            number_of(&answered, bodies::THROTTLE_MS, -1),
            pair.in_flight,
        ];
        for (column, value) in group.columns.iter_mut().zip(values) {
            column.push(value);
        }
        self.rows +=
            1 + group.bodies[CLIENT].mark().0 - marks[CLIENT].0 + group.bodies[BROKER].mark().0 - marks[BROKER].0;
        Ok(Some(opening))
    }
}

/// A request and the answer that may be its.
struct Pair<'a, 'b> {
    place: i64, // of its part
    number: i64,
    request: &'b Frame<'a>,
    response: &'b Frame<'a>,
    in_flight: i64,
    free_at: i64, // when the answer before it ended
}

fn correlation_id(frame: &Frame<'_>, side: usize) -> Option<i32> {
    let mut rope = frame.begin;
    rope.skip(HEADS[side] - 4)?;
    rope.number(4).map(|id| id as i32)
}

/// Where the session may stop behind the taken exchanges: one or a few are answered before the next request begins.
fn rest(requests: &mut Lane<'_>, answers: &mut Lane<'_>, taken: usize, waiting: usize) -> Option<Places> {
    for pair in taken..taken + MOST_APART {
        let response = answers.frame(waiting + pair)?.clone();
        let request = requests.frame(pair)?.clone();
        let next = requests.frame(pair + 1)?.head;
        if !is_paired(&request, &response) {
            return None;
        }
        if response.head < next {
            return Some((request.end.place(), response.end.place()));
        }
    }
    None
}

/// Whether the answer has the id of the request, and came behind it.
fn is_paired(request: &Frame<'_>, response: &Frame<'_>) -> bool {
    let id = correlation_id(request, CLIENT);
    id.is_some() && id == correlation_id(response, BROKER) && response.head > request.last
}

fn int64s<'py>(py: Python<'py>, numbers: &[i64]) -> PyResult<Bound<'py, PyByteArray>> {
    PyByteArray::new_bound_with(py, 8 * numbers.len(), |bytes| {
        for (place, number) in bytes.chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&number.to_ne_bytes());
        }
        Ok(())
    })
}

impl Group {
    /// (key and version, columns, rows of the requests' bodies, those of the responses'); columns are bytes of int64.
    fn into_python(self, py: Python<'_>, key_version: u32, kind: &Kind) -> PyResult<PyObject> {
        let mut columns = Vec::new();
        for column in &self.columns {
            columns.push(int64s(py, column)?);
        }
        let [asked, answered] = &self.bodies;
        let of_side = |side: usize, bodies: &Bodies| -> PyResult<Option<PyObject>> {
            kind.programs[side].as_ref().map(|_| rows(py, bodies)).transpose()
        };
        Ok((key_version, columns, of_side(CLIENT, asked)?, of_side(BROKER, answered)?).into_py(py))
    }
}

/// The rows of bodies as a dict: columns are bytes of int64, and texts are bytes.
fn rows(py: Python<'_>, bodies: &Bodies) -> PyResult<PyObject> {
    let found = PyDict::new_bound(py);
    let text = |text: &Option<Vec<u8>>| text.as_ref().map(|text| PyBytes::new_bound(py, text).unbind());
    let topics: Vec<_> = bodies.topics.values.iter().map(|(name, id)| (text(name), text(id))).collect();
    let words: Vec<_> = bodies.words.values.iter().map(text).collect();
    let mut numbers = Vec::new();
    for column in &bodies.numbers {
        numbers.push(int64s(py, column)?);
    }
    found.set_item("of", int64s(py, &bodies.of)?)?;
    found.set_item("topics", topics)?;
    found.set_item("topic", int64s(py, &bodies.topic)?)?;
    found.set_item("numbers", numbers)?;
    found.set_item("words", words)?;
    found.set_item("group_id", int64s(py, &bodies.group_id)?)?;
    found.set_item("metadata", int64s(py, &bodies.metadata)?)?;
    found.set_item("batch_of", int64s(py, &bodies.batch_of)?)?;
    found.set_item("batches", PyByteArray::new_bound(py, &bodies.batches))?;
    Ok(found.into())
}

/// Reads frames that are one behind the other in pieces of a window: (first byte, byte behind the last) of each piece.
///
/// sizes: of the frames; start: of their bodies. Returns (values of each body, None if it does not fit the program; rows).
#[pyfunction]
pub fn read_bodies(
    py: Python<'_>,
    program: Vec<u32>,
    window: PyBuffer<u8>,
    pieces: Vec<(i64, i64)>,
    sizes: Vec<usize>,
    start: usize,
) -> PyResult<(Vec<Option<Vec<i64>>>, PyObject)> {
    let window = bytes_of(py, &window)?;
    let (first, end): (Vec<i64>, Vec<i64>) = pieces.into_iter().unzip();
    let zeros = vec![0; first.len()];
    let segments = Segments { window, side: &zeros, start: &first, end: &end, time_ns: &zeros };
    if !bodies::is_sound(&program) || !segments.are_sound() {
        return Err(PyValueError::new_err("the program is not sound, or a piece is beyond the window"));
    }
    let mut rope = Rope::new(&segments, 0, 0, zeros.len());
    let mut found = Bodies::default();
    let mut values = Vec::new();
    for (place, size) in sizes.into_iter().enumerate() {
        let mark = found.mark();
        let mut body = rope.cut(size);
        let read = body.skip(start).and_then(|()| bodies::read(&program, body, &mut found, place as i64));
        if read.is_none() {
            found.truncate(mark);
        }
        values.push(read.map(|read| {
            let mut values = read.numbers[bodies::THROTTLE_MS..].to_vec();
            values.push(i64::from(read.has_rack()));
            values
        }));
        rope.skip(size);
    }
    Ok((values, rows(py, &found)?))
}
