import java.io.BufferedReader;
import java.io.FileReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.Base64;
import java.util.Properties;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * Kafka's own producer: sends what it reads, and says what became of it.
 *
 * Arguments: a file of properties, a topic. Standard input: lines of a number, a blank and the record's value in base64.
 * Standard output: "ack NUMBER", or "fault TEXT" for a record that was given up. Ends when the input does.
 */
public class Producing {
    public static void main(String[] arguments) throws Exception {
        Properties settings = new Properties();
        settings.load(new FileReader(arguments[0]));
        BufferedReader input = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.US_ASCII));
        try (var producer = new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer())) {
            for (String line = input.readLine(); line != null; line = input.readLine()) {
                int blank = line.indexOf(' ');
                long number = Long.parseLong(line.substring(0, blank));
                byte[] key = Long.toString(number % 100).getBytes(StandardCharsets.US_ASCII);
                byte[] value = Base64.getDecoder().decode(line.substring(blank + 1));
                producer.send(new ProducerRecord<>(arguments[1], key, value), (metadata, fault) -> {
                    synchronized (System.out) {
                        System.out.println(fault == null ? "ack " + number : "fault " + number + ": " + fault);
                        System.out.flush();
                    }
                });
            }
        }
    }
}
