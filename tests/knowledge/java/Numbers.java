import java.util.List;
import java.util.Map;
import java.util.stream.IntStream;
import org.apache.kafka.common.config.ConfigDef;
import org.apache.kafka.connect.connector.Task;
import org.apache.kafka.connect.source.SourceConnector;
import org.apache.kafka.connect.source.SourceRecord;
import org.apache.kafka.connect.source.SourceTask;

/** A connector whose tasks have nothing to say: how workers share them out is what matters. */
public class Numbers extends SourceConnector {
    private int tasks;

    @Override
    public void start(Map<String, String> settings) { tasks = Integer.parseInt(settings.get("tasks.max")); }

    @Override
    public Class<? extends Task> taskClass() { return Nothing.class; }

    @Override
    public List<Map<String, String>> taskConfigs(int most) {
        return IntStream.range(0, Math.min(most, tasks)).mapToObj(number -> Map.of("number", String.valueOf(number))).toList();
    }

    @Override
    public void stop() { }

    @Override
    public ConfigDef config() { return new ConfigDef(); }

    @Override
    public String version() { return "1"; }

    public static class Nothing extends SourceTask {
        @Override
        public String version() { return "1"; }

        @Override
        public void start(Map<String, String> settings) { }

        @Override
        public List<SourceRecord> poll() throws InterruptedException {
            Thread.sleep(200);
            return null;
        }

        @Override
        public void stop() { }
    }
}
