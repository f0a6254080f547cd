//! A turn of the event loop: the events of one call of epoll, those of lent connections without Python.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::conn::Side;
use crate::sockets::monotonic_ns;
use crate::tally::Lane;

/// The times of a turn in nanoseconds of the monotonic clock, as `kproxy/proxy/sockets/poller.py` has them.
pub struct Clock {
    pub now: i64,  // when the previous event was done
    pub turn: i64, // when epoll returned
    pub wall_offset: i64,
    pub is_late: bool, // bytes may have arrived long before `turn`
    pub is_in_order: bool,
    pub room: usize, // the bytes that one read may take
}

impl Clock {
    pub fn of(lane: &Lane, py: Python<'_>) -> PyResult<Self> {
        let mut clock = Clock { now: 0, turn: 0, wall_offset: 0, is_late: false, is_in_order: false, room: 0 };
        clock.read(lane, py)?;
        Ok(clock)
    }

    /// Takes what the poller has; after each call of Python code.
    pub fn read(&mut self, lane: &Lane, py: Python<'_>) -> PyResult<()> {
        let poller = lane.poller.bind(py);
        self.now = poller.getattr(intern!(py, "now_ns"))?.extract()?;
        self.turn = poller.getattr(intern!(py, "turn_ns"))?.extract()?;
        self.wall_offset = poller.getattr(intern!(py, "wall_offset_ns"))?.extract()?;
        self.is_late = poller.getattr(intern!(py, "is_late"))?.is_truthy()?;
        self.is_in_order = poller.getattr(intern!(py, "is_in_order"))?.is_truthy()?;
        self.room = lane.pressure.getattr(py, intern!(py, "read_bytes"))?.extract(py)?;
        Ok(())
    }

    /// Gives the poller what has changed; before each call of Python code.
    pub fn write(&self, lane: &Lane, py: Python<'_>) -> PyResult<()> {
        let poller = lane.poller.bind(py);
        poller.setattr(intern!(py, "now_ns"), self.now)?;
        poller.setattr(intern!(py, "is_late"), self.is_late)?;
        poller.setattr(intern!(py, "lag_bucket"), lane.lag.bucket_of(self.now - self.turn))
    }
}

/// Handles the events of one call of epoll in order, until one ends after `long_ns`; returns how many.
pub fn handle(
    lane: &Bound<'_, Lane>,
    ready: &Bound<'_, PyList>,
    readers: &Bound<'_, PyList>,
    long_ns: i64,
) -> PyResult<usize> {
    let py = lane.py();
    let mut clock = Clock::of(&lane.borrow(), py)?;
    let mut handled = 0;
    for event in ready.iter() {
        let (fd, events): (usize, u32) = event.extract()?;
        handled += 1;
        let reader = if events == libc::EPOLLIN as u32 { Some(readers.get_item(fd)?) } else { None };
        match reader {
            Some(reader) if reader.is_none() => {} // an earlier event of this turn closed it
            Some(reader) => match reader.downcast_exact::<Side>() {
                Ok(side) => {
                    let before = clock.now;
                    side.get().read(lane, &mut clock)?;
                    if clock.now == before {
                        clock.now = monotonic_ns(); // nothing was relayed: an end, or a defect
                    }
                }
                Err(_) => in_python(lane, &mut clock, || reader.call0())?,
            },
            None => {
                let poller = lane.borrow().poller.clone_ref(py);
                in_python(lane, &mut clock, || poller.bind(py).call_method1(intern!(py, "call_back"), (fd, events)))?;
            }
        }
        if clock.now > long_ns {
            break;
        }
    }
    let lane = lane.borrow();
    clock.write(&lane, py)?;
    Ok(handled)
}

fn in_python<'py>(
    lane: &Bound<'py, Lane>,
    clock: &mut Clock,
    call: impl FnOnce() -> PyResult<Bound<'py, PyAny>>,
) -> PyResult<()> {
    let before = clock.now;
    clock.write(&lane.borrow(), lane.py())?;
    call()?;
    clock.read(&lane.borrow(), lane.py())?;
    if clock.now == before {
        clock.now = monotonic_ns(); // a callback that does not tell the time
    }
    Ok(())
}
