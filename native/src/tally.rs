//! The counters that the connections of a lane fill, until Python takes them into the cells of the metrics.

use std::collections::HashMap;

use pyo3::exceptions::PyValueError;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyString};

use crate::program::{self, Found, Shape};
use crate::turn;

/// A histogram: a value counts at the first bound that is not below it.
#[derive(Clone)]
pub struct Histogram {
    bounds: Vec<i64>,
    counts: Vec<u64>,
    total: i64,
    last: usize, // the bucket of the last value: the next one is mostly in it too
}

impl Histogram {
    pub fn new(bounds: &[i64]) -> Self {
        Histogram { bounds: bounds.to_vec(), counts: vec![0; bounds.len() + 1], total: 0, last: 0 }
    }

    fn bucket(&mut self, value: i64) -> usize {
        let last = self.last;
        let is_above = last == 0 || self.bounds[last - 1] < value;
        let is_below = last == self.bounds.len() || value <= self.bounds[last];
        if !(is_above && is_below) {
            self.last = self.bucket_of(value);
        }
        self.last
    }

    pub fn bucket_of(&self, value: i64) -> usize {
        self.bounds.partition_point(|bound| *bound < value)
    }

    pub fn add(&mut self, value: i64, times: u64) {
        let bucket = self.bucket(value);
        self.counts[bucket] += times;
        self.total += value * times as i64;
    }

    /// Adds to the buckets alone: the total is that of positive values.
    pub fn add_positive(&mut self, value: i64) {
        let bucket = self.bucket(value);
        self.counts[bucket] += 1;
        self.total += value.max(0);
    }

    /// Moves the counts into a list of Python integers, and returns the total.
    fn flush(&mut self, counts: &Bound<'_, PyList>) -> PyResult<i64> {
        for (bucket, count) in self.counts.iter_mut().enumerate() {
            if *count > 0 {
                let sum: u64 = counts.get_item(bucket)?.extract()?;
                counts.set_item(bucket, sum + std::mem::take(count))?;
            }
        }
        Ok(std::mem::take(&mut self.total))
    }
}

/// Adds to an integer attribute.
fn add_to(object: &Bound<'_, PyAny>, name: &Bound<'_, PyString>, count: i64) -> PyResult<()> {
    if count != 0 {
        let sum: i64 = object.getattr(name)?.extract()?;
        object.setattr(name, sum + count)?;
    }
    Ok(())
}

/// The records produced to one topic-partition since the last flush.
struct Carried {
    topic: Vec<u8>, // name or id
    index: i32,
    bytes: i64,
    records: i64,
    batches: Vec<(i64, i64)>, // by codecs
    seen: i64,                // when the last request began
    appends: Vec<Append>,
}

/// Records that were appended one behind the other: offsets, and when the first was asked for and the last answered.
struct Append {
    first: i64,
    end: i64,
    asked: i64,
    answered: i64,
}

/// The cells of the metrics (`kproxy/metrics/counters/cells.py`) that a tally is flushed into.
struct Cells {
    api: PyObject,          // ApiCells
    lists: [Py<PyList>; 5], // its request_size, response_size, duration, waits and excess_wait
    broker: PyObject,       // BrokerCells
    queue: Py<PyList>,
    produced: PyObject, // takes what is carried; None: nothing is
}

/// The counters of one (cluster, broker, API, version).
#[pyclass]
pub struct Tally {
    pub is_fresh: bool, // it has counted since the last flush
    pub request_size: Histogram,
    pub response_size: Histogram,
    pub duration: Histogram,
    pub waits: Histogram,
    pub excess_wait: Histogram,
    pub queue: Histogram,
    pub sending_ns: i64,
    pub receiving_ns: i64,
    carried: Vec<Carried>,
    places: HashMap<Vec<u8>, usize>, // in `carried`: by the topic's name or id with the partition's index behind it
    place: usize,                    // of the last one: the next one is mostly the same
    cells: Option<Cells>, // None: cleared by the garbage collector
}

/// The times of one exchange, in nanoseconds of the session's clock.
pub struct Times {
    pub request_start: i64,
    pub request_end: i64,
    pub response_start: i64,
    pub response_end: i64,
    pub queue: i64,
}

impl Tally {
    /// Counts an answered exchange as `metrics/counting.py` does; returns the broker's time.
    pub fn count(&mut self, request_bytes: i64, response_bytes: i64, times: &Times, max_wait_ms: Option<i64>) -> i64 {
        self.request_size.add(request_bytes, 1);
        self.response_size.add(response_bytes, 1);
        if times.queue > 0 {
            self.queue.add(times.queue, 1);
        }
        let wait = times.response_end - times.request_start;
        let between = times.response_start - times.request_end;
        let duration = if wait == between {
            between - times.queue
        } else {
            let ready = times.request_start + times.queue;
            if times.request_end > ready {
                self.sending_ns += times.request_end - ready;
            }
            self.receiving_ns += times.response_end - times.response_start;
            times.response_start - ready.max(times.request_end)
        };
        self.waits.add(wait, 1);
        self.duration.add_positive(duration);
        if let Some(max_wait_ms) = max_wait_ms {
            self.excess_wait.add_positive(duration - max_wait_ms * 1_000_000);
        }
        duration
    }
}

impl Tally {
    /// Counts the records of an answered Produce; `said`: the offsets in the answer.
    pub fn count_records(&mut self, asked: &Found, said: &Found, times: &Times) {
        for each in &asked.partitions {
            let topic = asked.topic(each);
            let carried = self.carried_to(topic, each.index);
            carried.bytes += each.bytes;
            carried.records += each.records;
            carried.seen = times.request_start;
            match carried.batches.iter_mut().find(|(codecs, _)| *codecs == each.codecs) {
                Some((_, count)) => *count += each.batches,
                None => carried.batches.push((each.codecs, each.batches)),
            }
            let answer = said.partitions.iter().find(|one| one.index == each.index && said.topic(one) == topic);
            let first = answer.map_or(-1, |answer| answer.offset);
            if first < 0 || each.records == 0 {
                continue;
            }
            match carried.appends.last_mut() {
                Some(last) if last.end == first => {
                    last.end = last.end.saturating_add(each.records);
                    last.answered = times.response_start;
                }
                _ => carried.appends.push(Append {
                    first,
                    end: first.saturating_add(each.records),
                    asked: times.request_start,
                    answered: times.response_start,
                }),
            }
        }
    }

    fn carried_to(&mut self, topic: &[u8], index: i32) -> &mut Carried {
        let is_same = |carried: &Carried| carried.index == index && carried.topic == topic;
        if !self.carried.get(self.place).map_or(false, is_same) {
            let mut key = topic.to_vec();
            key.extend_from_slice(&index.to_be_bytes());
            self.place = *self.places.entry(key).or_insert(self.carried.len());
            if self.place == self.carried.len() {
                let (batches, appends) = (Vec::new(), Vec::new());
                let topic = topic.to_vec();
                self.carried.push(Carried { topic, index, bytes: 0, records: 0, batches, seen: 0, appends });
            }
        }
        &mut self.carried[self.place]
    }

    fn flush(&mut self, py: Python<'_>) -> PyResult<()> {
        self.is_fresh = false;
        let cells = match &self.cells {
            Some(cells) => cells,
            None => return Ok(()),
        };
        let api = cells.api.bind(py);
        let lists = &cells.lists;
        add_to(api, intern!(py, "request_bytes"), self.request_size.flush(lists[0].bind(py))?)?;
        add_to(api, intern!(py, "response_bytes"), self.response_size.flush(lists[1].bind(py))?)?;
        add_to(api, intern!(py, "duration_ns"), self.duration.flush(lists[2].bind(py))?)?;
        add_to(api, intern!(py, "waits_ns"), self.waits.flush(lists[3].bind(py))?)?;
        add_to(api, intern!(py, "excess_wait_ns"), self.excess_wait.flush(lists[4].bind(py))?)?;
        add_to(api, intern!(py, "sending_ns"), std::mem::take(&mut self.sending_ns))?;
        add_to(api, intern!(py, "receiving_ns"), std::mem::take(&mut self.receiving_ns))?;
        let queue_ns = self.queue.flush(cells.queue.bind(py))?;
        add_to(cells.broker.bind(py), intern!(py, "queue_ns"), queue_ns)?;
        self.places.clear();
        self.place = 0;
        for carried in self.carried.drain(..) {
            let appends: Vec<_> = carried.appends.iter().map(|one| (one.first, one.end, one.asked, one.answered)).collect();
            let topic = PyBytes::new_bound(py, &carried.topic);
            let said = (topic, carried.index, carried.bytes, carried.records, carried.batches, carried.seen, appends);
            cells.produced.call1(py, said)?;
        }
        Ok(())
    }
}

/// The cells of a broker refer to its tallies, and these to the cells: the garbage collector must see the circle.
#[pymethods]
impl Tally {
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        if let Some(cells) = &self.cells {
            visit.call(&cells.api)?;
            visit.call(&cells.broker)?;
            visit.call(&cells.queue)?;
            visit.call(&cells.produced)?;
            for list in &cells.lists {
                visit.call(list)?;
            }
        }
        Ok(())
    }

    fn __clear__(&mut self) {
        self.cells = None;
    }
}

/// The bounds of the histograms: durations, waits beyond max_wait_ms, queues and times inside kproxy in ns; bytes.
type Bounds = (Vec<i64>, Vec<i64>, Vec<i64>, Vec<i64>, Vec<i64>);

/// What all connections of one event loop share.
#[pyclass]
pub struct Lane {
    pub poller: PyObject,
    pub pressure: PyObject,
    pub clock_offset_ns: i64,
    pub buffer: Vec<u8>,
    shapes: Vec<(Py<Program>, Shape)>,
    pub spare: Vec<Box<Found>>,
    pub fresh: Vec<Py<Tally>>, // those that have counted since the last flush
    pub inside: [Histogram; 2],
    pub lag: Histogram,
    pub slow_ns: i64,
    #[pyo3(get)]
    pub part_bytes: usize, // of incomplete frames that wait for their rest, and of what pending Produces carry
    pub max_part: usize,   // of one incomplete frame
    pub max_parts: usize,  // of all together; beyond it Python reads such frames
    own: [(PyObject, Py<PyList>); 3], // the cells of `inside` and `lag`
    slow: PyObject,                   // kproxy/metrics/counters/slow.py
    bounds: Bounds,
}

/// The shapes that are remembered, of a few hundred bytes.
const SHAPES: usize = 16;
const LARGEST_SHAPE: usize = 256;

impl Lane {
    /// Whether a response is plain: most are, but for free bytes, as the last one of their program was.
    pub fn is_plain(&mut self, py: Python<'_>, program: &Py<Program>, response: &[u8]) -> bool {
        let operations = &program.get().operations;
        if response.len() > LARGEST_SHAPE {
            return program::is_plain(operations, response);
        }
        let place = self.shapes.iter().position(|(of, _)| of.is(program));
        if let Some(place) = place {
            if self.shapes[place].1.fits(response) {
                return true;
            }
        }
        let shape = match program::shape_of(operations, response) {
            Some(shape) => shape,
            None => return false,
        };
        match place {
            Some(place) => self.shapes[place].1 = shape,
            None => {
                if self.shapes.len() >= SHAPES {
                    self.shapes.remove(0);
                }
                self.shapes.push((program.clone_ref(py), shape));
            }
        }
        true
    }
}

#[pymethods]
impl Lane {
    /// The poller refers to the lane: without this neither would ever be freed.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.poller)?;
        visit.call(&self.pressure)?;
        visit.call(&self.slow)?;
        for (cells, counts) in &self.own {
            visit.call(cells)?;
            visit.call(counts)?;
        }
        for tally in &self.fresh {
            visit.call(tally)?;
        }
        Ok(())
    }

    /// max_parts: bytes of one incomplete frame, and of all `part_bytes`. inside, lag: DurationCells. slow: has `threshold_ns`, the
    /// broker's time above which an exchange is reported.
    #[new]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        poller: PyObject,
        pressure: PyObject,
        clock_offset_ns: i64,
        buffer_bytes: usize,
        max_parts: (usize, usize),
        bounds: Bounds,
        inside: (PyObject, PyObject),
        lag: PyObject,
        slow: PyObject,
    ) -> PyResult<Self> {
        let counts = |cells: PyObject| -> PyResult<(PyObject, Py<PyList>)> {
            let list = cells.getattr(py, "counts")?.extract(py)?;
            Ok((cells, list))
        };
        let empty = Histogram::new(&bounds.3);
        Ok(Lane {
            poller,
            pressure,
            clock_offset_ns,
            buffer: vec![0; buffer_bytes],
            shapes: Vec::new(),
            spare: Vec::new(),
            fresh: Vec::new(),
            inside: [empty.clone(), empty.clone()],
            lag: empty,
            slow_ns: 0,
            part_bytes: 0,
            max_part: max_parts.0,
            max_parts: max_parts.1,
            own: [counts(inside.0)?, counts(inside.1)?, counts(lag)?],
            slow,
            bounds,
        })
    }

    /// Makes the counters of one (cluster, broker, API, version), which are flushed into an ApiCells and a BrokerCells.
    ///
    /// produced: takes the records produced to a topic-partition since the last flush (metrics/counters/produced.py); or None.
    fn tally(&self, api: Bound<'_, PyAny>, broker: Bound<'_, PyAny>, produced: PyObject) -> PyResult<Tally> {
        let list = |name: &str| -> PyResult<Py<PyList>> { api.getattr(name)?.extract() };
        let lists =
            [list("request_size")?, list("response_size")?, list("duration")?, list("waits")?, list("excess_wait")?];
        let queue = broker.getattr("queue")?.extract()?;
        let (durations, excess, queues, _, sizes) = &self.bounds;
        Ok(Tally {
            is_fresh: false,
            request_size: Histogram::new(sizes),
            response_size: Histogram::new(sizes),
            duration: Histogram::new(durations),
            waits: Histogram::new(durations),
            excess_wait: Histogram::new(excess),
            queue: Histogram::new(queues),
            sending_ns: 0,
            receiving_ns: 0,
            carried: Vec::new(),
            places: HashMap::new(),
            place: 0,
            cells: Some(Cells { api: api.unbind(), lists, broker: broker.unbind(), queue, produced }),
        })
    }

    /// Handles the events of one call of epoll (turn.rs). ready: (file descriptor, events); readers: by file descriptor.
    fn handle(
        slf: &Bound<'_, Self>,
        ready: &Bound<'_, PyList>,
        readers: &Bound<'_, PyList>,
        long_ns: i64,
    ) -> PyResult<usize> {
        turn::handle(slf, ready, readers, long_ns)
    }

    /// Moves all counts into the cells. Only the thread of the event loop may call it: it adds to the same cells.
    fn flush(&mut self, py: Python<'_>) -> PyResult<()> {
        for tally in self.fresh.drain(..) {
            tally.borrow_mut(py).flush(py)?;
        }
        let [to_broker, to_client] = &mut self.inside;
        for (histogram, (cells, counts)) in [to_broker, to_client, &mut self.lag].into_iter().zip(&self.own) {
            let total_ns = histogram.flush(counts.bind(py))?;
            add_to(cells.bind(py), intern!(py, "total_ns"), total_ns)?;
        }
        self.slow_ns = self.slow.getattr(py, intern!(py, "threshold_ns"))?.extract(py)?;
        Ok(())
    }
}

/// A checked program (`kproxy/protocol/programs.py`).
#[pyclass(frozen)]
pub struct Program {
    pub operations: Vec<u32>,
}

#[pymethods]
impl Program {
    #[new]
    fn new(operations: Vec<u32>) -> PyResult<Self> {
        checked(&operations)?;
        Ok(Program { operations })
    }
}

pub fn checked(operations: &[u32]) -> PyResult<()> {
    if program::is_sound(operations) {
        Ok(())
    } else {
        Err(PyValueError::new_err("not a program: see native/src/program.rs"))
    }
}
